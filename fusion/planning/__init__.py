"""Every decision: whether fusing pays (`pays`), the choice of tiles (`cpu_planner`, `gpu`), and what that is predicted
to cost (`plan`)."""
