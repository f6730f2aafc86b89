"""The directory under its former name."""

from oper.directory import TableDirectory as TableDirectory, TierLayout as TierLayout
