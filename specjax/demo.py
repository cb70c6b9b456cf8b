class Demonstration: pass
