"""Chains, groups, chords and maps: stable ids for what a task sends; repeated chord members."""
