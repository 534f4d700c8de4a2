"""What a run will need, by formula: memory by kind and rank, speed, bytes between nodes.

Pure arithmetic over plain values: no torch, no network, nothing read but a `config.json`.
`report.make_plan` is the way in. The formulas are held against published measurements in
`tests/unit/plan/test_published.py`.
"""
