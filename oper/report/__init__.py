"""Pages with plots, each one file, from plans, statistics and benchmark records; ``oper doctor``,
which reports on an installation and its machine."""
