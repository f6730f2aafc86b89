"""``oper bench train --tables``: dynamic tables of raw keys, their speed and their quality."""
