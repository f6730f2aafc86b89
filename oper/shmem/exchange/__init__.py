"""Exchange of rows, sums and gradients between memory domains; de-duplicated reads within one."""
