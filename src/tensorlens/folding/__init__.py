"""A block as matrices: found by watching a replay, proved where it is used."""
