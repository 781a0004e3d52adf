"""How fast fisherjax is: both sides of every comparison measured in the same run."""
