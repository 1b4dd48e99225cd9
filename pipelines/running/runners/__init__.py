"""Where a pipeline runs: in this process, on a cluster's engine, on Dataflow."""
