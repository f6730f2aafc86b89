"""Autoencoders of what users have: their items as weighted bags, and a softmax over all items."""
