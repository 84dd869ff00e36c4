module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @grid = <["x"=2, "y"=4]>
  sdy.mesh @mesh = <["_axis_0"=8]>
  func.func public @main(%arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{"x"}, {"y"}]>, tf.aliasing_output = 1 : i32}, %arg1: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{}, {"x"}]>}, %arg2: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"_axis_0"}, {}]>}) -> (tensor<8x8xf32> {jax.result_info = "out.w", sdy.sharding = #sdy.sharding<@grid, [{}, {"x"}]>}, tensor<8x8xf32> {jax.result_info = "results[1]"}) {
    %0 = sdy.sharding_constraint %arg2 <@grid, [{"x"}, {?}]> : tensor<8x8xf32>
    %1 = stablehlo.add %arg0, %0 : tensor<8x8xf32>
    %2 = stablehlo.add %arg1, %1 : tensor<8x8xf32>
    return %2, %1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}
