"""Recipe of the shipped tiny GLM-5.3 checkpoint: data generator, trainer, conversion and scoring."""
