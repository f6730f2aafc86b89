"""Inference under MLPerf LoadGen, in processes and over HTTP."""
