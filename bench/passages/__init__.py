"""Which passage does an answer stand on? Documents, needles and injections, every rule set with every target."""
