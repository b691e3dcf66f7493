"""Whether a run fits hardware that is not here, what bounds its steps there, and what would make it fit."""
