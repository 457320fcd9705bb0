"""Daytona played on this machine: its control API, its events and its toolbox, over machines that are real."""
