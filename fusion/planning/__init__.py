"""Every decision: whether fusing pays (`pays`), the choice of tiles (`plan.planner_for`: `cpu_planner` or `gpu`; with
`options={"autotune": True}` the emitters measure its best), and what that is predicted to cost (`plan`)."""
