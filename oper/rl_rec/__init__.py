"""Recommenders trained on logged behaviour: data, models, simulators and evaluation.

CaD-VAE and CDT4Rec are re-implementations from abstracts and related public work and claim none of
the papers' numbers; other models follow the papers that their modules cite.
"""
