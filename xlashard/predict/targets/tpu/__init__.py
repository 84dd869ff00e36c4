"""TPUs: `generations` has figures of chips, `topology_names` a parser, `topologies` devices."""
