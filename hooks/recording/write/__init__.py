"""Writing a recording: the ledger of tasks, the shards, resuming after a crash."""
