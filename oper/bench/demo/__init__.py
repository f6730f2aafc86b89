"""``oper demo``: all stages on one log, compared with TorchRec and the unsharded model."""
