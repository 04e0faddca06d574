"""Browser tests: a real Chromium on a real JupyterLab. `server.py` starts it, `lab.py` drives it, `scripted.py` runs in its kernels."""
