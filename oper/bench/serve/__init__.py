"""``oper bench serve``: inference under MLPerf LoadGen, in process and over HTTP."""
