"""shmem."""
