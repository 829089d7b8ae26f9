"""Changing site values at chosen layers, visits, heads, experts and tokens."""

from visitlens.hooks.interventions import do as do
