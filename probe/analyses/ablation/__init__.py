"""Head ablation over a task or a recording, and the Dyck study that it feeds."""
