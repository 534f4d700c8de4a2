"""The pieces of the benchmarks: workloads, the contenders as processes, figures and plots."""
