"""RGP and LSG: low-rank gradient carriers."""
