"""``oper bench data``: preprocessing, access statistics and loading of logs."""
