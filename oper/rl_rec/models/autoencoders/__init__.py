"""Autoencoders of users' item sets: encoders of weighted bags, and softmax decoders over items."""
