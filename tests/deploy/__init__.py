"""Checks of deploy/ with the tools of others, by `make test-deploy`, which installs them in .venv-deploy.

check.py  the chart by Helm and kubernetes-validate; the images' build commands in a clean folder
"""
