"""Which passage is an answer based on? Documents, needles and injections, every rule set with every target."""
