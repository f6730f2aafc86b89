"""Plans executed on an emulated cluster: network namespaces with rate-limited links."""
