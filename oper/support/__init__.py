"""What every part of the package uses: checked files, folder locks, variables of the environment,
values of command-line flags, names loaded on first use, and compiled counting."""
