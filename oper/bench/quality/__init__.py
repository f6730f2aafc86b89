"""How good recommendations are."""
