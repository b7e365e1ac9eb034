"""What goes wrong in a simulated kernel."""


class SimulationError(RuntimeError):
    """A kernel that cannot be built for the simulator, or a fault while it ran; the message names the kernel."""
