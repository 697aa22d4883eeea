"""Jobs of real architectures, sampled with a seed and labelled by a trace."""
