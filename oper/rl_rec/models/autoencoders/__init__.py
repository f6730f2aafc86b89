"""Autoencoders of users' items: the items as weighted bags, and a softmax over all items."""
