"""From a folder or a hub name to a model that can be observed, and the inspection of one."""
