"""Recommenders from logged behaviour: interactions, trajectories, models, simulators, evaluation.

The models are re-implementations from abstracts and related public work; no claim is made on the
numbers of the papers.
"""
