"""What a result says of where it comes from: digests, versions, sources by their names."""
