"""Code that every package uses: checked files, folder locks, environment variables, values of
command-line flags, lazily loaded names, and compiled counting."""
