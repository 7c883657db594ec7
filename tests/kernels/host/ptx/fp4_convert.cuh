#pragma once

#define HARDWARE_E2M1 0
