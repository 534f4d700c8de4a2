"""The engines that sample, behind one protocol."""
