"""The command line and the main job."""
