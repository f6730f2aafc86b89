"""Lookups and training steps in processes that share a host, compared with TorchRec, torch and
fbgemm."""
