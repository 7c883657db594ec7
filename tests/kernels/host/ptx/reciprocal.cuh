#pragma once

inline float reciprocal_of_normal(float value) { return 1.0f / value; }
