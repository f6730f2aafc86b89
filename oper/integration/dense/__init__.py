"""Feature interaction of DLRMs, and gradient averaging of dense layers in shared memory."""
