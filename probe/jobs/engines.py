"""Who computes the shards of a recording: processes of this machine, or tasks on a Ray cluster. No torch."""

ENGINES = ("process", "ray")
