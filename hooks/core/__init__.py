"""The words everybody speaks: layer, visit, step, site, and the interface of a model that can be observed and changed."""
