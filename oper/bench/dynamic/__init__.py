"""``oper bench train --tables dynamic``: raw keys beside row numbers and TorchRec's maps."""
