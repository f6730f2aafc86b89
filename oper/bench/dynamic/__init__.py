"""``oper bench train --tables dynamic``: raw keys compared with row numbers and with TorchRec's
maps."""
