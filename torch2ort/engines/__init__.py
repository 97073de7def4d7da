"""What trains a graph, behind one interface."""
