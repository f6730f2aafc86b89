"""Lookups and training steps in processes that share a host, beside TorchRec, torch and fbgemm."""
