"""Self-contained HTML pages about plans, statistics and benchmark records, and ``oper doctor``."""
